// The activations that are fused into the normalisation. NaN goes through all of them, as in torch.
#pragma once

enum Activation { kNone, kRelu, kLeakyRelu, kSilu };

// An activation takes its input z as `t = kUnit * z`, where the factor is part of constants that a
// kernel multiplies with anyway, and its gradient is that of t. SiLU so gets the argument of exp2.
template <Activation A>
constexpr double kUnit = A == kSilu ? -1.4426950408889634 : 1.0;

// sigmoid(z) / kUnit, which is -ln(2) / (1 + exp2(t)).
__device__ inline float scaled_sigmoid(float t) {
  constexpr float kFactor = static_cast<float>(kUnit<kSilu>);
  return fast_reciprocal(fmaf(kFactor, fast_exp2(t), kFactor));
}

template <Activation A>
__device__ inline float activate(float t, float negative_slope) {
  if constexpr (A == kRelu) return t < 0.0f ? 0.0f : t;
  if constexpr (A == kLeakyRelu) return t > 0.0f ? t : t * negative_slope;
  if constexpr (A == kSilu) return t * scaled_sigmoid(t);
  return t;
}

// The gradient of `t` from the one behind the activation.
template <Activation A>
__device__ inline float activation_gradient(float grad, float t, float negative_slope) {
  if constexpr (A == kRelu) return t <= 0.0f ? 0.0f : grad;
  if constexpr (A == kLeakyRelu) return t > 0.0f ? grad : grad * negative_slope;
  if constexpr (A == kSilu) {
    constexpr float kLn2 = 0.6931471805599453f;
    const float s = scaled_sigmoid(t);
    return grad * s * fmaf(t, -kLn2 - s, 1.0f);  // 1 + z * (1 - sigmoid(z))
  }
  return grad;
}
