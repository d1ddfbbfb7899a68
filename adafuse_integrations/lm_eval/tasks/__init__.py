"""Task definitions, and the functions they name."""
