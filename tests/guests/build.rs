//! Link arguments of the guests.
//!
//! A guest is an ordinary executable of the host target, linked at a fixed
//! address without start files.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=guest.ld");
    if std::env::var_os("CARGO_FEATURE_BAREMETAL").is_none() {
        return;
    }
    if std::env::var("PROFILE").as_deref() == Ok("debug") {
        println!("cargo:warning=a guest cannot unwind: build it with `--profile testbed`");
    }
    let Ok(folder) = std::env::var("CARGO_MANIFEST_DIR") else {
        println!("cargo:error=cargo did not say where the manifest is");
        return;
    };
    for argument in [
        "-nostartfiles",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,--gc-sections",
        "-Wl,-z,max-page-size=4096",
        "-Wl,-z,noexecstack",
        "-Wl,-z,norelro",
        "-Wl,--no-eh-frame-hdr",
    ] {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
    println!("cargo:rustc-link-arg-bins=-Wl,-T,{folder}/guest.ld");
}
