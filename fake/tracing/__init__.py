"""Changes that acceleration makes to torch's tracers, besides the dispatch of fake tensors."""
