// The activations that are fused into the normalisation. NaN goes through all of them, as in torch.
#pragma once

enum Activation { kNone, kRelu, kLeakyRelu, kSilu };

__device__ inline float sigmoid(float z) {
  constexpr float kLog2E = 1.4426950408889634f;
  return fast_reciprocal(1.0f + fast_exp2(-kLog2E * z));
}

template <Activation A>
__device__ inline float activate(float z, float negative_slope) {
  if constexpr (A == kRelu) return z < 0.0f ? 0.0f : z;
  if constexpr (A == kLeakyRelu) return z > 0.0f ? z : z * negative_slope;
  if constexpr (A == kSilu) return z * sigmoid(z);
  return z;
}

// The gradient before the activation, from the one behind it and the activation's input `z`.
template <Activation A>
__device__ inline float activation_gradient(float grad, float z, float negative_slope) {
  if constexpr (A == kRelu) return z <= 0.0f ? 0.0f : grad;
  if constexpr (A == kLeakyRelu) return z > 0.0f ? grad : grad * negative_slope;
  if constexpr (A == kSilu) {
    const float s = sigmoid(z);
    return grad * (s * (1.0f + z * (1.0f - s)));
  }
  return grad;
}
