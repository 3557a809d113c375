"""DeepSpeed's ZeRO as a strategy: optimizer state and parameters in host memory."""

LIBRARIES = {"deepspeed": "DS_BUILD_OPS=0 pip install --no-build-isolation ninja deepspeed"}
MOVED = {"ftkit.strategies.deepspeed": "deepspeed"}
