"""Gradients of a batch's loss: by autograd, and checked without a backward pass.

`of_batch.batch_gradients` gives the loss and the gradient of every stored parameter and of every
capture point, by torch's autograd through the project's own forward pass. `differences` checks a
given gradient by two forward passes in numpy. `memory` says what a backward takes.
"""
