//! Connections: taking them, bounding them, and ending them one after the other.

use std::convert::Infallible;
use std::fmt;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use super::app::{App, Phase, Shared};
use super::config::Bind;
use super::guard::{MAX_HEADER_BYTES, Peer, is_loopback};
use super::status;

/// Most headers of a request.
const MAX_HEADERS: usize = 128;

/// How long connections may take to close when nothing is served any more.
const CLOSING: Duration = Duration::from_secs(1);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "http://{address}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All requests were answered.
    Drained,
    /// So many answers were cut short.
    Cut(usize),
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    async fn bind(bind: &Bind) -> io::Result<Listener> {
        match bind {
            Bind::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port)).await?;
                Ok(Listener::Tcp(listener))
            }
            Bind::Unix(path) => Ok(Listener::Unix(bind_unix(path)?, path.clone())),
        }
    }

    fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Listener::Unix(_, path) => Ok(Address::Unix(path.clone())),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whether a server could listen there now: asked before a model is loaded, which may take minutes.
///
/// # Errors
/// What keeps it from listening.
pub fn probe(bind: &Bind) -> io::Result<()> {
    match bind {
        Bind::Tcp { host, port } => std::net::TcpListener::bind((host.as_str(), *port)).map(|_| ()),
        Bind::Unix(path) => {
            clear_unix(path)?;
            std::os::unix::net::UnixListener::bind(path)?;
            std::fs::remove_file(path)
        }
    }
}

/// Removes a socket that nobody listens on any more.
fn clear_unix(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = match path.symlink_metadata() {
        Ok(file) => file.file_type().is_socket(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    // A file of another kind is not ours to remove.
    if !is_socket || std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    std::fs::remove_file(path)
}

/// A socket for its owner alone. One that nobody listens on any more is replaced.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    clear_unix(path)?;
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until a signal ends it.
pub async fn serve(
    app: Shared,
    router: Router,
    on_ready: impl FnOnce(&Address) -> io::Result<()>,
) -> io::Result<Outcome> {
    let stop = stop_signals()?;
    let listener = Listener::bind(&app.config.bind).await?;
    on_ready(&listener.address()?)?;
    let _status = status::watch(&app);
    let connections = GracefulShutdown::new();
    let ending = async {
        stop.asked.notified().await;
        app.enter(Phase::Leaving);
        let delay = app.config.drain_delay;
        if !delay.is_zero() {
            let seconds = delay.as_secs_f64();
            tell(&app, &format!("ending: requests are taken for {seconds} s more"));
        }
        sleep_or(delay, &stop.insisted).await;
        app.enter(Phase::Draining);
        drain(&app, &stop.insisted).await
    };
    // To its end it listens: probes are answered, and requests told to go elsewhere.
    let cut = tokio::select! {
        never = accept(&app, &listener, router, &connections) => match never {},
        cut = ending => cut,
    };
    drop(listener);
    let _ = timeout(CLOSING, connections.shutdown()).await;
    Ok(if cut == 0 { Outcome::Drained } else { Outcome::Cut(cut) })
}

/// Tells who watches the server how it ends.
fn tell(app: &App, line: &str) {
    if !app.config.quiet {
        // Nobody may be left to read it.
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Waits for what is being served; returns how many answers had to be cut short.
async fn drain(app: &App, insisted: &Notify) -> usize {
    let answers = app.answers();
    if answers > 0 {
        let seconds = app.config.shutdown_timeout.as_secs_f64();
        let run = if answers == 1 { "answer runs" } else { "answers run" };
        tell(app, &format!("draining: {answers} {run}, up to {seconds} s; a second signal cuts"));
    }
    let all_ended = async {
        while app.answers() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        result = timeout(app.config.shutdown_timeout, all_ended) => if result.is_ok() { return 0 },
        () = insisted.notified() => {}
    }
    let cut = app.answers();
    app.engine.stopper().cancel_all();
    // Their clients are still told.
    let told = async {
        while app.answers() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    let _ = timeout(CLOSING, told).await;
    cut
}

async fn sleep_or(time: Duration, insisted: &Notify) {
    tokio::select! {
        () = sleep(time) => {}
        () = insisted.notified() => insisted.notify_one(),
    }
}

/// The signals that end a server.
struct Stop {
    /// The first.
    asked: Arc<Notify>,
    /// The second, or one that does not wait.
    insisted: Arc<Notify>,
}

/// Listens for the signals from now on.
fn stop_signals() -> io::Result<Stop> {
    let (asked, insisted) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let stop = Stop { asked: Arc::clone(&asked), insisted: Arc::clone(&insisted) };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    tokio::spawn(async move {
        let mut count = 0;
        loop {
            let is_urgent = tokio::select! {
                _ = terminate.recv() => false,
                _ = interrupt.recv() => false,
                _ = quit.recv() => true,
            };
            count += 1;
            asked.notify_one();
            if is_urgent || count > 1 {
                insisted.notify_one();
            }
        }
    });
    Ok(stop)
}

/// Takes connections, as many at once as there are permits.
async fn accept(
    app: &Shared,
    listener: &Listener,
    router: Router,
    connections: &GracefulShutdown,
) -> Infallible {
    let permits = Arc::new(Semaphore::new(app.config.max_connections));
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.expect("it is never closed");
        let accepted = match listener {
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, peer)| {
                let _ = stream.set_nodelay(true);
                let patience = Some(app.config.write_timeout);
                let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(patience);
                let peer = Peer { is_local: is_loopback(&peer.ip().to_string()) };
                connection(app, router.clone(), stream, peer, connections)
            }),
            Listener::Unix(listener, _) => listener.accept().await.map(|(stream, _)| {
                connection(app, router.clone(), stream, Peer { is_local: true }, connections)
            }),
        };
        match accepted {
            Ok(served) => {
                tokio::spawn(async move {
                    served.await;
                    drop(permit);
                });
            }
            // Too many open files, or a client that left at once: neither ends the server.
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Serves one connection to its end.
fn connection(
    app: &App,
    router: Router,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    connections: &GracefulShutdown,
) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        router.clone().oneshot(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(app.config.header_timeout)
        .max_headers(MAX_HEADERS)
        // What does not end within it is not read on; the guard counts what does.
        .max_buf_size(MAX_HEADER_BYTES)
        // A token is a few hundred bytes: to copy them costs less than to write a list of pieces.
        .writev(false)
        .serve_connection(TokioIo::new(stream), service);
    let connection = connections.watch(connection);
    Box::pin(async move {
        // A client that breaks off is no fault of the server.
        let _ = connection.await;
    })
}
