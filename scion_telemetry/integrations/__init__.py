"""Other projects' interfaces on top of the tracker, one module each; importing this package imports none of them."""
