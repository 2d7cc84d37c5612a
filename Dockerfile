# The serving image. Build: docker build -t dsv41-triton .
# BASE_IMAGE may be any Debian 12 / Ubuntu image with apt, or NVIDIA's Triton server image with the
# Python backend, which brings its own CUDA libraries.
ARG BASE_IMAGE=debian:12-slim
FROM ${BASE_IMAGE}

WORKDIR /opt/dsv41
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY plugins plugins
COPY engine engine
COPY builder builder
COPY python_backend python_backend
COPY client client
COPY model_repository model_repository
COPY scripts scripts
# The script that `make setup` runs: system packages, then .venv from requirements.lock.
RUN scripts/setup.sh

ENV PATH=/opt/dsv41/.venv/bin:$PATH
# HTTP, gRPC, metrics
EXPOSE 8000 8001 8002
ENTRYPOINT ["dsv41-serve", "--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=0.0.0.0"]
CMD ["--engine", "/engine"]
