"""The path of a call from its arguments to a backend: check each argument once, and see arrays as plain rows."""
