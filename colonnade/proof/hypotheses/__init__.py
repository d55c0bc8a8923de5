"""What can be wrong with a gradient, a norm or a weight, each as a small function that tests it on the numbers."""
