// A library that mpirun preloads: its sockets for "any address" are bound to loopback.
//
// Open MPI's launcher listens on every interface for daemons of other hosts, which a world on one host has none of, and
// until PRRTE 4.2 no parameter says otherwise. Processes of other names, the ranks among them, are left alone.

#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

namespace {

constexpr const char* kLaunchers[] = {"mpirun", "mpiexec", "prterun", "prte", "orterun"};

bool is_launcher() {
  for (const char* name : kLaunchers) {
    if (std::strcmp(program_invocation_short_name, name) == 0) return true;
  }
  return false;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  using Bind = int (*)(int, const sockaddr*, socklen_t);
  static const auto next = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  if (is_launcher() && address != nullptr && size >= sizeof(sockaddr_in) && address->sa_family == AF_INET) {
    sockaddr_in local{};
    std::memcpy(&local, address, sizeof(local));
    if (local.sin_addr.s_addr == htonl(INADDR_ANY)) local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return next(fd, reinterpret_cast<const sockaddr*>(&local), sizeof(local));
  }
  if (is_launcher() && address != nullptr && size >= sizeof(sockaddr_in6) && address->sa_family == AF_INET6) {
    sockaddr_in6 local{};
    std::memcpy(&local, address, sizeof(local));
    if (IN6_IS_ADDR_UNSPECIFIED(&local.sin6_addr)) local.sin6_addr = in6addr_loopback;
    const int bound = next(fd, reinterpret_cast<const sockaddr*>(&local), sizeof(local));
    // A system without IPv6 has no ::1; nobody can reach "any address" of that family either.
    if (bound == 0 || errno != EADDRNOTAVAIL) return bound;
  }
  return next(fd, address, size);
}
