// Last kernel of the forward pass: y = activation(weight * (x - mean) * invstd + bias + residual).
//
// The statistics come from the sums over all ranks; the first block of each tile also moves the
// running statistics on.
#pragma once

struct NormalizeArguments {
  Geometry geometry;
  const void* x;
  const void* residual;
  void* y;
  const double* sums;   // [2 * channels + 1] over all ranks, from `stats`
  double* statistics;   // [2 * channels + 1] for the backward pass: mean, invstd, count
  Affine affine;
  void* running_mean;  // null where running statistics are not kept
  void* running_var;
  long long* num_batches_tracked;
  unsigned* counter;  // zero before the launch and after it
  double eps;
  double momentum;  // negative: cumulative average
  float negative_slope;
  int parameter_type;
  int running_type;
};

// As nn.BatchNorm does on the whole batch. Without any value nothing is updated, and with a single
// one there is no unbiased variance.
__device__ inline void update_running(const NormalizeArguments& arguments,
                                      const Statistics& batch, long long channel) {
  if (!arguments.running_mean || !(batch.count > 0.0)) return;
  double factor = arguments.momentum;
  if (factor < 0.0) {
    const long long* before = arguments.num_batches_tracked;
    factor = before ? 1.0 / static_cast<double>(*before + 1) : 0.0;
  }
  const int type = arguments.running_type;
  const double mean = read(arguments.running_mean, type, channel);
  write(arguments.running_mean, type, channel, mean + factor * (batch.mean - mean));
  if (!(batch.count > 1.0)) return;
  const double unbiased = batch.variance * (batch.count / (batch.count - 1.0));
  const double variance = read(arguments.running_var, type, channel);
  write(arguments.running_var, type, channel, variance + factor * (unbiased - variance));
}

// Count this batch once all tiles have read the number of those before it.
__device__ inline void count_batch(const NormalizeArguments& arguments, double count) {
  if (!arguments.num_batches_tracked || threadIdx.x != 0 || threadIdx.y != 0) return;
  if (atomicInc(arguments.counter, gridDim.x - 1) == gridDim.x - 1 && count > 0.0) {
    *arguments.num_batches_tracked += 1;
  }
}

template <typename T, Layout L, int V, Activation F, bool kResidual>
__device__ inline void normalize(const NormalizeArguments& arguments) {
  constexpr int A = Position<L, V>::kChannels;
  constexpr int kInFlight = kResidual ? 2 : 4;
  extern __shared__ double shared_memory[];
  const Geometry& geometry = arguments.geometry;
  const T* __restrict__ x = static_cast<const T*>(arguments.x);
  const T* __restrict__ residual = static_cast<const T*>(arguments.residual);
  T* __restrict__ y = static_cast<T*>(arguments.y);
  Position<L, V> position(geometry);

  const long long channels = geometry.channels;
  const Constants constants{reinterpret_cast<float*>(shared_memory),
                            static_cast<int>(blockDim.x) * A};
  constants.fill(channels, [&](int i, long long channel) {
    const Statistics batch = finalize(arguments.sums, channel, channels, arguments.eps);
    const float mean = static_cast<float>(batch.mean);
    const double scale =
        weight_of(arguments.affine, arguments.parameter_type, channel) * batch.invstd;
    constants.set(0, i, mean);
    constants.set(1, i, kUnit<F> * scale);
    constants.set(2, i, kUnit<F> * (bias_of(arguments.affine, arguments.parameter_type, channel) -
                                    (batch.mean - mean) * scale));
    if (blockIdx.y == 0) {
      keep(arguments.statistics, batch, channel, channels);
      update_running(arguments, batch, channel);
    }
  });
  if (blockIdx.y == 0) count_batch(arguments, arguments.sums[2 * channels]);
  float mean[A], scale[A], shift[A];
  constants.get(0, mean);
  constants.get(1, scale);
  constants.get(2, shift);

  for_each_group<kInFlight>(position.count, [&](int valid) {
    Vector<T, V> vectors[kInFlight];
    Vector<T, V> residuals[kInFlight];
    long long offsets[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      offsets[j] = position.offset;
      if (j < valid) {
        vectors[j] = load<T, V>(x + position.offset);
        if constexpr (kResidual) residuals[j] = load<T, V>(residual + position.offset);
      }
      position.advance(geometry);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (j >= valid) break;
      float values[V], added[V] = {};
      vectors[j].get(values);
      if constexpr (kResidual) residuals[j].get(added);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int a = A == 1 ? 0 : k;
        float t = fmaf(values[k] - mean[a], scale[a], shift[a]);
        if constexpr (kResidual) t = fmaf(added[k], static_cast<float>(kUnit<F>), t);
        values[k] = activate<F>(t, arguments.negative_slope);
      }
      store<T, V>(y + offsets[j], values);
    }
  });
}
