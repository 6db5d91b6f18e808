"""What acceleration changes in torch's tracers besides the dispatch of fake tensors."""
