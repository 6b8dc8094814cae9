// The C++ runtime and a program's start take these from newer C libraries. 2.28 has all that is used here.
#include <features.h>
#if __GLIBC_PREREQ(2, 34)
#include <fcntl.h>
#include <stddef.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC visibility push(hidden)

char __libc_single_threaded = 0;

int stat(const char* path, void* status) {
  return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, 0);
}
int lstat(const char* path, void* status) {
  return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
int fstat(int file, void* status) {
  return (int)syscall(SYS_fstat, file, status);
}
int fstat64(int file, void* status) {
  return fstat(file, status);
}

unsigned arc4random(void) {
  unsigned value;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}

#ifdef LOGITLESS_PROGRAM
// The start of a program calls __libc_start_main. Before 2.34 that one leaves constructors to the program.
#ifdef __x86_64__
__asm__(".symver older_start_main, __libc_start_main@GLIBC_2.2.5");
#else
__asm__(".symver older_start_main, __libc_start_main@GLIBC_2.17");
#endif
typedef int Main(int, char**, char**);
typedef void Constructor(int, char**, char**);
extern __attribute__((visibility("default"))) int older_start_main(Main*, int, char**, Constructor*,
                                                                   void (*)(void), void (*)(void), void*);
extern Constructor *__init_array_start[], *__init_array_end[];

static void construct(int argc, char** argv, char** environment) {
  for (Constructor** each = __init_array_start; each != __init_array_end; ++each)
    (*each)(argc, argv, environment);
}

int __libc_start_main(Main* main, int argc, char** argv, Constructor* init, void (*end)(void),
                      void (*end_of_loader)(void), void* end_of_stack) {
  (void)init;
  return older_start_main(main, argc, argv, construct, end, end_of_loader, end_of_stack);
}
#endif
#endif
