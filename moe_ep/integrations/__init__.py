"""Model code that calls the layer."""
