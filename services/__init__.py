"""The eight services, each a pure core and a thin shell, and the console that runs them."""
