"""How one launch does a whole Mixture-of-Experts layer."""
