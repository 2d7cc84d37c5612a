"""The V4.1 network, written like the technical report: encoder, decoder and draft segments."""

from engine.network.load import load_weights
from engine.network.network import Network
from engine.network.weights import NetworkWeights

__all__ = ["Network", "NetworkWeights", "load_weights"]
