"""HTTP routes, each with its schemas and parameters."""
