//! How a server starts and ends: its place, its ready line, signals and exit codes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program::{arg, program, stderr};
use crate::support::Reply;

/// What takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(180);

/// `deltapool serve` with these arguments, run to its end.
pub fn serve(args: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = program();
    command.arg("serve").args(args).envs(variables.iter().copied());
    command.output().expect("the program starts")
}

/// A server that is ready, and what it said until then.
struct Started {
    child: Child,
    said: Vec<String>,
    lines: std::io::Lines<BufReader<ChildStderr>>,
    address: String,
}

impl Started {
    fn new(args: &[&str], variables: &[(&str, &str)]) -> Started {
        let mut command = program();
        command.args(["serve", "--device-memory", "64MiB"]).args(args);
        command.envs(variables.iter().copied()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut server = Started { child, said: Vec::new(), lines, address: String::new() };
        while server.address.is_empty() {
            let Some(line) = server.lines.next() else {
                panic!("it did not start: {:#?}", server.said);
            };
            let line = line.expect("it is text");
            if let Some((_, rest)) = line.split_once(" s: ") {
                let place = rest.split_whitespace().next().expect("a place");
                server.address = place.trim_start_matches("http://").to_owned();
            }
            server.said.push(line);
        }
        server
    }

    /// Sends a signal by its name.
    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.expect("a shell").success());
    }

    fn exit_code(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is ours") {
                return status.code();
            }
            assert!(start.elapsed() < PATIENCE, "it does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A stream of so many tokens, of which the first has come.
    fn stream(&self, tokens: usize) -> Reply {
        let body = json!({
            "prompt": "Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": true,
            "stream": true,
        });
        let mut reply = Reply::read(self.post("/v1/completions", &body));
        assert_eq!(reply.status, 200);
        let first = reply.piece().expect("a token");
        assert!(first.starts_with(b"data: "), "{first:?}");
        reply
    }

    fn post(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("it reads");
        stream
    }

    /// Waits until no request is let in any more; returns how the last was refused.
    fn wait_until_draining(&self) -> Reply {
        let start = Instant::now();
        loop {
            let body = json!({ "prompt": "A fox", "max_tokens": 1 });
            let reply = Reply::read(self.post("/v1/completions", &body));
            if reply.status != 200 {
                return reply;
            }
            assert!(start.elapsed() < PATIENCE, "it still lets requests in");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn get(&self, path: &str) -> Reply {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("it reads");
        Reply::read(stream)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_port_that_is_taken_is_told_before_a_model_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    // The folder is not there: that would be told, with another code, if it were looked at.
    let output = serve(&["/nowhere", "--port", &port], &[]);
    let said = stderr(&output);
    assert!(said.starts_with(&format!("error: 127.0.0.1:{port}: ")), "{said}");
    assert_eq!(output.status.code(), Some(5));
    let output = serve(&["--host", "no.such.host.invalid", "--port", "0"], &[]);
    assert_eq!(output.status.code(), Some(74), "{}", stderr(&output));
}

#[test]
fn a_socket_in_the_file_system_is_its_owners_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("socket");
    // An address in a weaker place does not stand against the flag.
    let mut server = Started::new(&["--uds", arg(&path)], &[("DELTAPOOL_PORT", "1")]);
    let mode = fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).expect("it listens");
    let request = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // A second server does not take it over.
    assert_eq!(serve(&["--uds", arg(&path)], &[]).status.code(), Some(5));
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
    assert!(!path.exists(), "the socket is removed");
}

/// `--uds` once removed whatever stood at its path.
#[test]
fn a_file_that_is_no_socket_is_not_replaced_by_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("letter");
    fs::write(&path, "dear").expect("a file");
    assert_eq!(serve(&["--uds", arg(&path)], &[]).status.code(), Some(5));
    assert_eq!(fs::read_to_string(&path).expect("it is there"), "dear");
}

#[test]
fn a_stream_that_runs_is_finished_after_a_signal_and_the_server_ends_well() {
    let mut server = Started::new(&["--port", "0"], &[]);
    let reply = server.stream(200);
    server.signal("TERM");
    let text = reply.text();
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_second_signal_cuts_what_runs_and_the_exit_code_says_so() {
    let mut server = Started::new(&["--port", "0", "--shutdown-timeout", "3600"], &[]);
    let reply = server.stream(8000);
    server.signal("TERM");
    let refused = server.wait_until_draining();
    assert_eq!(refused.status, 503);
    let mut told = server.lines.by_ref().map(|line| line.expect("it is text"));
    let told = told.find(|line| line.starts_with("draining: ")).expect("a line");
    assert!(told.ends_with(", up to 3600 s; a second signal cuts"), "{told}");
    assert_eq!(server.get("/v1/engine/snapshot").json()["phase"], "draining");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.json()["error"]["code"], "draining");
    // A connection that was to stay open does not.
    let mut open = TcpStream::connect(&server.address).expect("it listens");
    let asks = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"A\"}";
    open.write_all(asks.as_bytes()).expect("it reads");
    assert_eq!(Reply::read(open).header("connection"), Some("close"));
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.get("/health").status, 200, "what runs is seen to");
    server.signal("TERM");
    let text = reply.text();
    assert!(!text.contains("\"finish_reason\":\"length\""), "it was cut");
    assert_eq!(server.exit_code(), Some(75));
    assert_eq!(last_line(&mut server), "error: 1 answer was cut short");
}

fn last_line(server: &mut Started) -> String {
    let lines = server.lines.by_ref().map(|line| line.expect("it is text"));
    lines.last().unwrap_or_default()
}

#[test]
fn requests_are_still_taken_for_the_time_that_a_balancer_needs() {
    let mut server = Started::new(&["--port", "0", "--drain-delay", "3600"], &[]);
    server.signal("TERM");
    let start = Instant::now();
    while server.get("/ready").status == 200 {
        assert!(start.elapsed() < PATIENCE, "it still says that it is ready");
    }
    assert_eq!(server.get("/health").status, 200);
    let body = json!({ "prompt": "A fox", "max_tokens": 1 });
    assert_eq!(Reply::read(server.post("/v1/completions", &body)).status, 200);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn what_outlasts_the_time_to_end_is_cut() {
    let args = ["--port", "0", "--shutdown-timeout", "0.05", "--drain-delay", "0.01"];
    let mut server = Started::new(&args, &[]);
    let reply = server.stream(8000);
    server.signal("INT");
    assert_eq!(server.exit_code(), Some(75));
    drop(reply);
}

#[test]
fn readiness_is_one_line_and_a_file_with_the_port() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("port");
    let server = Started::new(&["--port", "0", "--port-file", arg(&file)], &[]);
    let (before, ready) = server.said.split_at(server.said.len() - 1);
    let port = server.address.rsplit(':').next().expect("a port");
    assert!(ready[0].starts_with("ready in "), "{ready:?}");
    assert!(ready[0].contains("  model tiny  context 8,192  "), "{ready:?}");
    // It is there when the line is.
    assert_eq!(fs::read_to_string(&file).expect("it is whole"), format!("{port}\n"));
    // Loading is told in tenths where no terminal shows a bar.
    assert!(before.iter().any(|line| line == "loading 100 %"), "{before:?}");
    let loading = before.iter().filter(|line| line.starts_with("loading ")).count();
    assert!(loading <= 10, "{before:?}");
}

/// A script that waited for the file once read the port of the last server.
#[test]
fn the_file_with_the_port_is_there_only_while_requests_are_taken() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("port");
    fs::write(&file, "1\n").expect("a file");
    // What an earlier server left is gone before a model is looked for.
    let output = serve(&["/nowhere", "--port", "0", "--port-file", arg(&file)], &[]);
    assert_eq!((output.status.code(), file.exists()), (Some(3), false), "{}", stderr(&output));
    let mut server = Started::new(&["--port", "0", "--port-file", arg(&file)], &[]);
    assert!(file.exists());
    server.signal("TERM");
    assert_eq!((server.exit_code(), file.exists()), (Some(0), false));
    let mut server = Started::new(&["--port", "0", "--port-file", arg(&file)], &[]);
    fs::write(&file, "2\n").expect("a file");
    server.signal("TERM");
    assert_eq!((server.exit_code(), file.exists()), (Some(0), true), "it is another server's now");
}

/// It once was told after the line that says that all is well, under the name of an address.
#[test]
fn a_file_for_the_port_that_cannot_be_written_ends_the_start() {
    let path = "/nowhere/port";
    for (args, variables, named) in [
        (&["--port-file", path][..], &[][..], format!("--port-file {path}")),
        (
            &[],
            &[("DELTAPOOL_PORT_FILE", path)],
            format!("environment variable DELTAPOOL_PORT_FILE: --port-file {path}"),
        ),
    ] {
        let output = serve(&[&["--port", "0"], args].concat(), variables);
        let said = stderr(&output);
        assert!(said.starts_with(&format!("error: {named}: No such file")), "{said}");
        assert_eq!(output.status.code(), Some(1));
    }
}

/// As long as it was bound only after the weights were loaded, that could take minutes.
#[test]
fn a_socket_that_cannot_be_is_told_before_a_model_is_loaded() {
    let output = serve(&["/nowhere", "--uds", "/nowhere/x.sock"], &[]);
    let said = stderr(&output);
    assert!(said.starts_with("error: /nowhere/x.sock: No such file"), "{said}");
    assert_eq!(output.status.code(), Some(74));
}

#[test]
fn a_server_for_everybody_says_so() {
    let warns = |server: &Started| server.said.iter().any(|line| line.starts_with("warning: "));
    let open = Started::new(&["--port", "0", "--host", "0.0.0.0"], &[]);
    assert!(warns(&open), "{:?}", open.said);
    let key = ["--port", "0", "--host", "0.0.0.0", "--api-key", "one"];
    assert!(!warns(&Started::new(&key, &[])));
    assert!(!warns(&Started::new(&["--port", "0"], &[])));
    // As the line writes it.
    let six = Started::new(&["--port", "0", "--host", "[::1]"], &[]);
    assert!(six.address.starts_with("[::1]:") && !warns(&six), "{}", six.address);
}

#[test]
fn the_load_is_told_while_there_is_any() {
    let mut server = Started::new(&["--port", "0", "--status-every", "0.05"], &[]);
    let reply = server.stream(8000);
    let line = server.lines.next().expect("a line").expect("it is text");
    let parts: Vec<&str> =
        line.split(", ").map(|part| part.split(' ').next().unwrap_or("")).collect();
    assert_eq!(
        parts,
        [
            "prompt",
            "generation",
            "running",
            "waiting",
            "swapped",
            "device",
            "slots",
            "host",
            "prefix"
        ],
        "{line}"
    );
    assert!(line.contains(" running 1, waiting 0, swapped 0, "), "{line}");
    drop(reply);
    server.signal("TERM");
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn an_idle_server_says_nothing_and_a_quiet_one_never_does() {
    let mut idle = Started::new(&["--port", "0", "--status-every", "0.01"], &[]);
    for _ in 0..20 {
        assert_eq!(Reply::read(idle.post("/tokenize", &json!({"prompt": "a"}))).status, 200);
    }
    idle.signal("TERM");
    assert_eq!(idle.exit_code(), Some(0));
    assert_eq!(last_line(&mut idle), "");
    let mut quiet = Started::new(&["--port", "0", "--status-every", "0.01", "--quiet"], &[]);
    assert_eq!(quiet.said.len(), 1, "{:?}", quiet.said);
    quiet.stream(20).text();
    quiet.signal("TERM");
    assert_eq!(quiet.exit_code(), Some(0));
    assert_eq!(last_line(&mut quiet), "");
}

#[test]
fn keys_come_from_a_file_as_well() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("keys");
    fs::write(&file, "# for the tests\none\n\n two \n").expect("a file");
    let args = ["--port", "0", "--api-key-file", arg(&file), "--api-key", "three"];
    let server = Started::new(&args, &[]);
    for (key, status) in
        [("one", 200), ("two", 200), ("three", 200), ("# for the tests", 401), ("", 401)]
    {
        let mut stream = TcpStream::connect(&server.address).expect("it listens");
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\
             Connection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("it reads");
        assert_eq!(Reply::read(stream).status, status, "{key:?}");
    }
}

#[test]
fn a_chat_template_of_ones_own_is_applied_and_a_broken_one_ends_the_start() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("template.jinja");
    fs::write(&file, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        .expect("a file");
    let server = Started::new(&["--port", "0", "--chat-template", arg(&file)], &[]);
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = Reply::read(server.post("/apply-template", &messages)).json();
    assert_eq!(reply["prompt"], "<user>hi");
    fs::write(&file, "{% for %}").expect("a file");
    let output = serve(&["--port", "0", "--chat-template", arg(&file)], &[]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
}

#[test]
fn flags_that_change_nothing_are_noted() {
    let server = Started::new(&["--port", "0", "--trust-remote-code", "--tp-size=1"], &[]);
    assert_eq!(
        server.said[..2],
        [
            "--trust-remote-code is ignored: no code of a model's folder is run",
            "--tp-size 1 is ignored: a model is computed by one process; use --threads"
        ]
    );
}
