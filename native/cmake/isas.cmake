# The instruction sets to compile the kernels for. Sets RL_ISAS, least demanding first, and RL_FLAGS_<isa> for each.
# A set whose flags this compiler does not know is left out, and that is said.
include(CheckCXXCompilerFlag)

set(RL_ISAS portable)
set(RL_FLAGS_portable "")
set(isas)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(RL_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(RL_FLAGS_avxvnni ${RL_FLAGS_avx2} -mavxvnni)
  set(RL_FLAGS_avx512vnni -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mf16c -mfma
      -mprefer-vector-width=512)
  set(RL_FLAGS_avx512 ${RL_FLAGS_avx512vnni} -mavx512bf16 -mavx512vbmi)
  set(RL_FLAGS_amx ${RL_FLAGS_avx512} -mamx-tile -mamx-bf16 -mamx-int8)
  set(isas avx2 avxvnni avx512vnni avx512 amx)
  if(RL_SANITIZE)
    # Sanitizers do not see what a tile load reads; test_amx_emulated shows them the same kernels.
    list(REMOVE_ITEM isas amx)
    # A sanitized build is only ever run here: kernels that this CPU cannot run would be compiled for nothing.
    if(EXISTS /proc/cpuinfo)
      file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags" LIMIT_COUNT 1)
      foreach(needed IN ITEMS avx2:avx2 avxvnni:avx_vnni avx512vnni:avx512_vnni avx512:avx512_bf16)
        string(REPLACE ":" ";" needed ${needed})
        list(GET needed 0 isa)
        list(GET needed 1 flag)
        if(NOT "${cpu_flags} " MATCHES " ${flag} ")
          list(REMOVE_ITEM isas ${isa})
        endif()
      endforeach()
    endif()
    # avx512 is avx512vnni but for dot_bf16 and store_bf16 (simd_avx512.h). A sanitizer sees what avx512vnni reads in
    # dot_bf16, and not what the assembler of avx512 reads; test_amx_emulated has both functions as avx512 has them.
    list(REMOVE_ITEM isas avx512)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  # RL_NEON: not __ARM_NEON, which the portable kernels of this architecture are compiled with as well.
  set(RL_FLAGS_neon -DRL_NEON)
  set(RL_FLAGS_dotprod ${RL_FLAGS_neon} -march=armv8.2-a+dotprod)
  set(RL_FLAGS_i8mm ${RL_FLAGS_neon} -march=armv8.2-a+dotprod+i8mm)
  set(isas neon dotprod i8mm)
endif()
foreach(isa IN LISTS isas)
  string(REPLACE ";" " " flags "${RL_FLAGS_${isa}}")
  check_cxx_compiler_flag("${flags}" RL_COMPILES_${isa})
  if(RL_COMPILES_${isa})
    list(APPEND RL_ISAS ${isa})
  else()
    message(WARNING "ridgeline: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} does not know ${flags}: "
                    "the ${isa} kernels are left out, and CPUs that have them will run slower ones")
  endif()
endforeach()
message(STATUS "ridgeline: kernels for ${RL_ISAS}")
