"""One way from what the user gave to a backend: check everything once, see the array as rows."""
