"""Do the tests notice mistakes? Single changes made at random to the package, and the tests that should notice each."""
