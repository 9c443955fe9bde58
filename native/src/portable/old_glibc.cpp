// The functions that glibc 2.32 and 2.34 gave new symbol versions, by their older ones, which every glibc has. Linked
// into the library of a wheel only (RL_PORTABLE): built on a new system, it loads on glibc 2.27 too. The linker's
// --wrap sends calls here, those of the static libstdc++ included. The functions themselves have not changed.
#include <pthread.h>
#include <sched.h>

extern "C" {

int old_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
int old_pthread_join(pthread_t, void**);
int old_pthread_setaffinity_np(pthread_t, size_t, const cpu_set_t*);
__asm__(".symver old_pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver old_pthread_join, pthread_join@GLIBC_2.2.5");
__asm__(".symver old_pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  return old_pthread_create(thread, attributes, run, argument);
}

int __wrap_pthread_join(pthread_t thread, void** result) { return old_pthread_join(thread, result); }

int __wrap_pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t* cpus) {
  return old_pthread_setaffinity_np(thread, size, cpus);
}

// libstdc++ reads it to leave out atomic operations in a process with one thread. 0: never leave them out.
char __libc_single_threaded = 0;
}
