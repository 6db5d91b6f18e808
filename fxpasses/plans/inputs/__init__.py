"""What a call brings along besides the model: arguments, numbers, gradients, tensors that are exchanged, settings."""
