/* A folder of a tool's own under TMPDIR or /tmp, for files that are gone with it. */
#ifndef TOOLS_SCRATCH_H
#define TOOLS_SCRATCH_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* 0 when it could not be made: errno says why, path where. */
static int scratch_open(char *path, size_t size) {
    const char *root = getenv("TMPDIR");
    snprintf(path, size, "%s/normjit-XXXXXX", root && root[0] ? root : "/tmp");
    return mkdtemp(path) != NULL;
}

static void scratch_close(const char *path) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && (entry = readdir(folder)) != NULL) {
        char name[4096];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        remove(name);
    }
    if (folder) closedir(folder);
    rmdir(path);
}

#endif
