"""The language model that is trained: its network, loss, weights and quantised layers."""
