# The GPU environment: training, evaluation and `make first-light`. The host needs an NVIDIA driver, R580 or newer, and the
# NVIDIA Container Toolkit.
#   docker build -t gtpo .
#   docker run --gpus all --shm-size 8g -e HF_TOKEN -v "$PWD/outputs:/gtpo/outputs" \
#       -v "$HOME/.cache/huggingface:/root/.cache/huggingface" gtpo python train_gtpo.py --model llama --dataset gsm8k --G 12
FROM python:3.12-bookworm

WORKDIR /gtpo
# PyTorch's wheels bring CUDA; Triton and torch.compile need the image's C compiler and Python.h.
COPY requirements/lock-x86_64.txt requirements/lock-aarch64.txt requirements/
RUN python -m venv .venv && .venv/bin/python -m pip install --no-cache-dir -r "requirements/lock-$(uname -m).txt" pytest==9.2.0
ENV PATH=/gtpo/.venv/bin:$PATH
COPY . .
RUN python train_gtpo.py --model llama --dataset gsm8k --G 12 --dry_run && make --dry-run first-light
CMD ["make", "first-light", "GPU_PYTHON=python"]
