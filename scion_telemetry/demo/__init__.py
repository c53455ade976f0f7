"""The demo: a small language model on text that every machine has, trained under the tracker."""
