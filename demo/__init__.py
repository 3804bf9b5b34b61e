"""Train and evaluate the demo model that ships in the package. `README.md` describes it."""
