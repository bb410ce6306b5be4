"""The losses of routers, and the biases with which they select experts."""
