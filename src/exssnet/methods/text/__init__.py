"""Methods that train a text encoder, or what is put into it, on tokens."""
