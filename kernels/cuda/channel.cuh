// Per-channel numbers: parameters of any dtype, the statistics of the global batch, the constants
// of a tile in shared memory.
//
// Statistics are worked out in double, once per channel and block. Threads subtract the mean rounded
// to float, which is exact for values near it; what rounding took away is part of the constant that
// they add afterwards, where it costs nothing.
#pragma once

enum ScalarType { kFloat, kHalf, kBFloat16, kDouble };

__device__ inline double read(const void* values, int type, long long index) {
  if (type == kHalf) return to_float(static_cast<const Half*>(values)[index]);
  if (type == kBFloat16) return to_float(static_cast<const BFloat16*>(values)[index]);
  if (type == kDouble) return static_cast<const double*>(values)[index];
  return static_cast<const float*>(values)[index];
}

__device__ inline void write(void* values, int type, long long index, double value) {
  const float rounded = static_cast<float>(value);
  if (type == kHalf) {
    round_to(rounded, static_cast<Half*>(values) + index);
  } else if (type == kBFloat16) {
    round_to(rounded, static_cast<BFloat16*>(values) + index);
  } else if (type == kDouble) {
    static_cast<double*>(values)[index] = value;
  } else {
    static_cast<float*>(values)[index] = rounded;
  }
}

// weight and bias; null without them.
struct Affine {
  const void* weight;
  const void* bias;
};

__device__ inline double weight_of(const Affine& affine, int type, long long channel) {
  return affine.weight ? read(affine.weight, type, channel) : 1.0;
}

__device__ inline double bias_of(const Affine& affine, int type, long long channel) {
  return affine.bias ? read(affine.bias, type, channel) : 0.0;
}

// Statistics of one channel in the batch of all ranks.
struct Statistics {
  double count, mean, variance, invstd;
};

// From the sums over all ranks, [n*mean | M2 + n*mean^2 | n].
__device__ inline Statistics finalize(const double* sums, long long channel, long long channels,
                                      double eps) {
  Statistics result;
  result.count = sums[2 * channels];
  const double inverse = result.count > 0.0 ? 1.0 / result.count : 0.0;
  result.mean = sums[channel] * inverse;
  result.variance = sums[channels + channel] * inverse - result.mean * result.mean;
  if (result.variance < 0.0) result.variance = 0.0;  // by rounding; NaN stays
  result.invstd = 1.0 / sqrt(result.variance + eps);
  return result;
}

// What the forward pass keeps for the backward pass: [mean | invstd | count].
__device__ inline void keep(double* statistics, const Statistics& values, long long channel,
                            long long channels) {
  statistics[channel] = values.mean;
  statistics[channels + channel] = values.invstd;
  if (channel == 0) statistics[2 * channels] = values.count;
}

// The constants of a tile: K floats for each channel of the block, in shared memory.
struct Constants {
  float* shared;
  int channels;  // of the tile

  // Call `fill(index in the tile, channel)` for each channel, each in one thread.
  template <typename Fill>
  __device__ void fill(long long all_channels, Fill fill) const {
    const int threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < channels; i += threads) {
      const long long channel = static_cast<long long>(blockIdx.x) * channels + i;
      if (channel < all_channels) fill(i, channel);
    }
    __syncthreads();
  }

  __device__ void set(int k, int index, double value) const {
    shared[k * channels + index] = static_cast<float>(value);
  }

  // Those of the calling thread, which owns A channels.
  template <int A>
  __device__ void get(int k, float (&values)[A]) const {
#pragma unroll
    for (int i = 0; i < A; ++i) values[i] = shared[k * channels + threadIdx.x * A + i];
  }
};
