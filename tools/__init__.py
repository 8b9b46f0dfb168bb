"""Scripts that make what is in the repository: tables, pictures, models that ship."""
