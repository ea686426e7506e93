// Made by `python -m allspan.kernels.abi.sampling`, which says what each field is. Never edited.
#ifndef ALLSPAN_SAMPLING_ABI
#define ALLSPAN_SAMPLING_ABI

struct Settings {
  unsigned long long seed;
  double top_p;
  double typical_p;
  float temperature;
  float min_z;
  int top_k;
  int is_random;
};
static_assert(sizeof(Settings) == 40);

struct Change {
  double repetition;
  float presence;
  float frequency;
  int row;
  int words;
  int bias;
  int mask;
  int output_only;
  int unused;
};
static_assert(sizeof(Change) == 40);

constexpr int kNotFinite = -1, kAllMasked = -2;

#endif
