// op_check [VARIANT …]: checks every op of the variants named, or of all that this CPU can run, against plain double
// precision. Prints what can run here, each failure, and digests of the integer products
// and of sampled tokens. Exit status 1: a check
// failed; 2: a variant cannot run here.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  const std::vector<Variant>& all = allspan::variants();
  std::printf("variants:");
  for (const Variant& variant : all) std::printf(" %s", variant.name);
  std::printf("\n");
  std::fflush(stdout);

  std::vector<const Variant*> chosen;
  for (const Variant& variant : all)
    if (argc == 1) chosen.push_back(&variant);
  for (int i = 1; i < argc; ++i) {
    for (const Variant& variant : all)
      if (std::strcmp(argv[i], variant.name) == 0) chosen.push_back(&variant);
    if (static_cast<int>(chosen.size()) == i) continue;
    std::printf("%s cannot run here\n", argv[i]);
    return 2;
  }
  Checks checks(chosen);
  check_isa(checks);
  check_elementwise(checks);
  check_attention(checks);
  check_experts(checks);
  const uint64_t digest = check_packed(checks);
  std::printf("integer products: %016" PRIx64 "\n", digest);
  std::printf("sampled tokens: %016" PRIx64 "\n", check_sampling(checks));
  std::printf("checks: %" PRId64 ", failures: %" PRId64 "\n", checks.count(), checks.failures());
  return checks.failures() > 0;
}
