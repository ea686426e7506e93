"""What the kernel's files say about memory, read from files of our own."""

from allspan.protos.cluster.available_memory import available_bytes

KIB, GIB = 1024, 2**30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def host(root, available_kib=8 * 2**20):
    write(root / "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 12 kB\nMemAvailable: {available_kib} kB\n")


def node(root, number, cpus, free_kib, cached_kib=0):
    folder = root / f"sys/devices/system/node/node{number}"
    write(folder / "cpulist", cpus + "\n")
    write(
        folder / "meminfo",
        f"Node {number} MemFree:  {free_kib} kB\nNode {number} FilePages: {cached_kib} kB\nNode {number} Shmem: 0 kB\n",
    )


def test_the_host_s_available_memory(tmp_path):
    host(tmp_path)
    assert available_bytes(root=tmp_path) == 8 * GIB


def test_only_the_nodes_of_the_given_processors_count(tmp_path):
    host(tmp_path)
    node(tmp_path, 0, "0-3,8", 2**20)
    node(tmp_path, 1, "4-7", 2**20, cached_kib=2**20)
    assert available_bytes((8,), tmp_path) == GIB
    assert available_bytes((5,), tmp_path) == 2 * GIB
    assert available_bytes((0, 5), tmp_path) == 3 * GIB
    assert available_bytes((), tmp_path) == 8 * GIB


def test_a_control_group_bounds_it(tmp_path):
    host(tmp_path)
    group = tmp_path / "sys/fs/cgroup"
    write(group / "memory.max", str(3 * GIB))
    write(group / "memory.current", str(2 * GIB))
    write(group / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    assert available_bytes(root=tmp_path) == GIB + GIB // 2


def test_a_control_group_without_a_limit_bounds_nothing(tmp_path):
    host(tmp_path)
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "5\n")
    assert available_bytes(root=tmp_path) == 8 * GIB


def test_the_older_control_groups_bound_it_too(tmp_path):
    host(tmp_path)
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", str(GIB))
    write(group / "memory.usage_in_bytes", str(GIB // 4))
    write(group / "memory.stat", "total_inactive_file 0\n")
    assert available_bytes(root=tmp_path) == GIB - GIB // 4


def test_this_machine_has_some():
    assert available_bytes() > 0


def test_the_tightest_of_the_nested_groups_that_this_process_is_in_counts(tmp_path):
    write(tmp_path / "proc/meminfo", "MemAvailable:   1000 kB\n")
    write(tmp_path / "proc/self/cgroup", "9:cpu:/elsewhere\n4:memory:/outer/inner\n0::/\n")
    for name, limit, used in (("outer", 500_000, 100_000), ("outer/inner", 2**62, 50), ("other", 1, 1)):
        write(tmp_path / f"sys/fs/cgroup/memory/{name}/memory.limit_in_bytes", f"{limit}\n")
        write(tmp_path / f"sys/fs/cgroup/memory/{name}/memory.usage_in_bytes", f"{used}\n")
    assert available_bytes(root=tmp_path) == 400_000
