"""How processes come to life, and what this machine can do."""
