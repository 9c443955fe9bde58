# Finds the C++ compiler, or says what to install. Included before any language is enabled.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  unset(CMAKE_CXX_COMPILER CACHE)  # or the next run in this folder would not look for a compiler again
  set(tried "c++, g++ and clang++ on PATH")
  if(DEFINED ENV{CXX})
    set(tried "CXX=$ENV{CXX}")
  endif()
  message(FATAL_ERROR
"ridgeline: no C++ compiler that works was found (tried ${tried}); the native CPU library needs one with C++17.
  Debian, Ubuntu   sudo apt install g++
  Fedora, RHEL     sudo dnf install gcc-c++
  Alpine           sudo apk add g++ linux-headers
  macOS            xcode-select --install
  conda            conda install cxx-compiler
Then install again. To do without the library and serve with PyTorch instead (much slower on CPUs):
  RIDGELINE_NATIVE=0 pip install '.[torch]'")
endif()
enable_language(CXX)
