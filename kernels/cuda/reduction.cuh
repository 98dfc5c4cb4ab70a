// Sums of two quantities per channel, over a block and then over the splits of the grid.
//
// The order of every addition is fixed by the launch, so results are the same in every run. The
// last block of a tile to finish adds up the tile's partial sums, in double; its counter returns to
// zero by itself, so no launch has to clear it.
#pragma once

constexpr int kMaxThreads = 256;  // of a block

struct Workspace {
  float* partials;     // [splits, 2, channels]
  unsigned* counters;  // [tiles], zero before the launch and after it
};

// Sum each value over threadIdx.y; threadIdx.y == 0 receives the sums. `scratch` holds K values of
// every thread and may be used again after the return. In each round the upper half hands over; a
// slot is written in one round only, so a round needs one barrier.
template <int K, typename F>
__device__ inline void sum_over_y(F (&values)[K], F* scratch) {
  const int threads = blockDim.x * blockDim.y;
  const int me = threadIdx.y * blockDim.x + threadIdx.x;
  const int y = threadIdx.y;
  for (int height = blockDim.y; height > 1;) {
    const int half = (height + 1) / 2;
    if (y >= half && y < height) {
#pragma unroll
      for (int k = 0; k < K; ++k) scratch[k * threads + me] = values[k];
    }
    __syncthreads();
    if (y + half < height) {
#pragma unroll
      for (int k = 0; k < K; ++k) values[k] += scratch[k * threads + me + half * blockDim.x];
    }
    height = half;
  }
  __syncthreads();
}

// Whether this block is the last one of its tile. Every thread of the block must call it.
__device__ inline bool is_last_block(unsigned* counters, void* scratch) {
  unsigned* ticket = static_cast<unsigned*>(scratch);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    *ticket = atomicInc(&counters[blockIdx.x], gridDim.y - 1);
  }
  __syncthreads();
  const bool last = *ticket == gridDim.y - 1;
  __syncthreads();
  return last;
}

// Sum `values` (first quantity of all channels, then the second) over the block and the splits.
// True in the threads that received `totals`: those with threadIdx.y == 0 of each tile's last block.
template <int A>
__device__ inline bool sum_over_grid(float (&values)[2 * A], double (&totals)[2 * A],
                                     long long channel, long long channels,
                                     const Workspace& workspace, void* scratch) {
  sum_over_y<2 * A>(values, static_cast<float*>(scratch));
  if (gridDim.y == 1) {
#pragma unroll
    for (int k = 0; k < 2 * A; ++k) totals[k] = values[k];
    return threadIdx.y == 0 && channel < channels;
  }
  if (threadIdx.y == 0 && channel < channels) {
    float* partial = workspace.partials + 2 * channels * blockIdx.y + channel;
#pragma unroll
    for (int k = 0; k < A; ++k) {
      partial[k] = values[k];
      partial[channels + k] = values[A + k];
    }
  }
  if (!is_last_block(workspace.counters, scratch)) return false;
#pragma unroll
  for (int quantity = 0; quantity < 2; ++quantity) {
    double sums[A] = {};
    if (channel < channels) {
      for (int split = threadIdx.y; split < gridDim.y; split += blockDim.y) {
        const float* partial =
            workspace.partials + channels * (2LL * split + quantity) + channel;
#pragma unroll
        for (int k = 0; k < A; ++k) sums[k] += load_coherent(partial + k);
      }
    }
    sum_over_y<A>(sums, static_cast<double*>(scratch));
#pragma unroll
    for (int k = 0; k < A; ++k) totals[quantity * A + k] = sums[k];
  }
  return threadIdx.y == 0 && channel < channels;
}
