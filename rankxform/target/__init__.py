"""What is made of a source: the destination's tensors, files, names and places."""
