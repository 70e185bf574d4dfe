"""What two or more services use. Imports proto, never services."""
