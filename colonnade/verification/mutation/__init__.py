"""Known mistakes, planted one at a time, and who notices."""
