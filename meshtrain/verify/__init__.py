"""Does a plan compute what one device computes? A tiny copy of the model, in float64, next to the stock model."""
