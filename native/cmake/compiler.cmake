# Finds the C++ compiler, or says what to install. Included before any language is enabled.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  if(DEFINED ENV{CXX})
    set(found "CXX=$ENV{CXX} names none that works.")
  else()
    set(found "None was found (looked for c++, g++ and clang++ on PATH, and at $CXX).")
  endif()
  message(FATAL_ERROR "
ridgeline: a C++17 compiler is needed to build the native CPU library. ${found}

  Debian, Ubuntu   sudo apt install g++
  Fedora, RHEL     sudo dnf install gcc-c++
  Alpine           sudo apk add g++ linux-headers
  macOS            xcode-select --install
  conda            conda install cxx-compiler

Then install again. To do without the library, and serve with PyTorch instead (much slower on CPUs):

  RIDGELINE_NATIVE=0 pip install 'ridgeline[torch]'     (in a checkout: RIDGELINE_NATIVE=0 pip install '.[torch]')
")
endif()
enable_language(CXX)
