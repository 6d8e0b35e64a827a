"""Kernel and softmax attention whose keys are streamed: `streamed` is the autograd function."""
