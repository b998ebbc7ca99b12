# The CUDA image. The wheels of torch bring the CUDA libraries; the host brings the driver and the container toolkit.
# docker build -f docker/cuda.Dockerfile -t dare-lightning:cuda .
# docker run --gpus all --shm-size 8g -v "$PWD/runs:/runs" dare-lightning:cuda fit trainer=one_gpu
FROM python:3.11-slim-bookworm

# git: the commit is recorded with every run. gcc: kernels that torch compiles on first use.
RUN apt-get update && apt-get install -y --no-install-recommends git gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Dependencies first: a change of the code then leaves this layer alone.
WORKDIR /opt/dare-lightning
COPY constraints.txt ./
RUN pip install -c constraints.txt torch
COPY . .
RUN pip install -c constraints.txt .

# Runs, the tracking store and downloaded checkpoints belong to the user, in folders to mount.
RUN useradd --create-home dare && mkdir -p /runs && chown dare /runs
USER dare
WORKDIR /runs
ENV HF_HOME=/runs/.huggingface
VOLUME /runs
ENTRYPOINT ["python", "-m", "dare_lightning"]
CMD ["fit", "run_root=/runs"]
