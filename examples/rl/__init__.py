"""The parts of `examples/rl_loop.py`: the model, its trainer, its sampler, the picture."""
