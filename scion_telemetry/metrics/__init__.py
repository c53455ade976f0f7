"""What is measured: pure functions on local tensors, and the catalogue that says how their results merge."""
