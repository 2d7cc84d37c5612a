"""The segments of an engine as ONNX graphs, and the graphs executed."""
