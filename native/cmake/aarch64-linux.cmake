# Cross-compiles for 64-bit ARM on Linux, and runs the tests under QEMU (make test-arm). Debian: g++-aarch64-linux-gnu, qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
# Of each set the tests run on a CPU that has it and nothing better.
set(RL_CPU_OF_neon ";QEMU_CPU=cortex-a72")
set(RL_CPU_OF_dotprod ";QEMU_CPU=cortex-a76")
set(RL_CPU_OF_i8mm ";QEMU_CPU=max")
set(RL_CPU_OF_portable ";QEMU_CPU=cortex-a72")
