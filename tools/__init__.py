"""Scripts of continuous integration, and those that make what is in the repository."""
