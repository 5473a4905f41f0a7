"""How bytes and signals move between ranks."""
