#include "check.h"
uint64_t check_packed(Checks&) { return 0; }
