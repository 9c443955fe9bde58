# Links the library for systems older than this one, for a wheel: libstdc++ inside (libgcc_s is on every Linux), and
# on x86-64 glibc's old symbol versions. A static libgcc would need glibc 2.35 for its unwinder.
include(CheckCXXSymbolExists)
# Without --gc-sections, parts of libstdc++ that the library never calls would ask for newer functions.
target_link_options(ridgeline_native PRIVATE -static-libstdc++ LINKER:--gc-sections)
check_cxx_symbol_exists(__GLIBC__ features.h RL_GLIBC)
if(RL_GLIBC AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_sources(ridgeline_native PRIVATE src/portable/old_glibc.cpp)
  # Before glibc 2.34 the thread functions are in libpthread.so.0; since then it is an empty library.
  target_link_options(ridgeline_native PRIVATE LINKER:--wrap=pthread_create LINKER:--wrap=pthread_join
                      LINKER:--wrap=pthread_setaffinity_np LINKER:--no-as-needed -l:libpthread.so.0 LINKER:--as-needed)
endif()
